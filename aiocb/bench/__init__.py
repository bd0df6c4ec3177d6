"""Measurements that users can repeat: `aiocb bench overhead | kernels | offline | serve`."""
