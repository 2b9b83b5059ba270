#pragma once

inline unsigned long long passing_by() { return 0; }
void copy_bulk(unsigned smem_to, const void* from, unsigned num_bytes, unsigned barrier,
               unsigned long long policy);
