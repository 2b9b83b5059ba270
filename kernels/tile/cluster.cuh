// All threads of all blocks of a cluster. Before sm_90: of the block.
#pragma once

#include "ptx/cluster.cuh"

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
