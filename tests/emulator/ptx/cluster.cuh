#pragma once

#include "ptx/shared.cuh"

unsigned cluster_rank();
void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
unsigned address_in_block(unsigned own, unsigned rank);
void store_cluster_async(unsigned to, unsigned barrier, const float4& v);
float load_cluster_float(unsigned from);
