"""Which request runs when: continuous batching under a token budget. Torch-free, no clock, no threads."""

from aiocb.scheduler.request import ParallelGroup, Request, RequestStatus
from aiocb.scheduler.scheduler import Finished, Scheduler, Update

__all__ = ["Finished", "ParallelGroup", "Request", "RequestStatus", "Scheduler", "Update"]
