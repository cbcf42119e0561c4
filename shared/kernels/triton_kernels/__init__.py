"""The Triton kernels themselves; `shared.kernels.triton_backend` launches them."""
