"""Floor 2: device kernels: Triton in the `*_triton.py` files, torch twins beside them."""
