"""Device code: Triton functions by concept, and the kernels that backend.py launches."""
