#pragma once

inline long long clock_now() { return 0; }
