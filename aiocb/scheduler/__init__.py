"""Which request runs when: continuous batching under a token budget. Torch-free, no clock, no threads."""

from aiocb.scheduler.events import Finished, Update
from aiocb.scheduler.request import ParallelGroup, Request, RequestStatus
from aiocb.scheduler.scheduler import Scheduler

__all__ = ["Finished", "ParallelGroup", "Request", "RequestStatus", "Scheduler", "Update"]
