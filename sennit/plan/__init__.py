"""From lengths and page tables to work items: pure functions of integers, and the tensors that kernels read."""
