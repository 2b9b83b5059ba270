#pragma once

void wait_for_previous();
inline void let_next_start() {}
