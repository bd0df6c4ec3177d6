"""Measurements that users can repeat: `aiocb bench overhead | loop | startup | kernels | offline | serve | ...`."""
