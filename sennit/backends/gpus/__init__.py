"""What backends for NVIDIA GPUs share: devices, launches, the cache's kernels, and parts of attention kernels."""
