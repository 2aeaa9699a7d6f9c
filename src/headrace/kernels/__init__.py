"""Floor 2: device kernels. Triton lives in the `*_triton.py` files, their torch twins beside them."""
