"""On a machine without CUDA kernels run in Triton's interpreter.

Triton reads the variable when it is first imported, so it is set before any test file is.
"""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
