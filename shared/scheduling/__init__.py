"""Which request runs when: pure CPU state, numpy only, the same on every rank.

`core.SchedulerCore` is the whole of it, `config` what it is told.  The parts, in the order a request meets
them: `req`, `policy`, `admission`, `batcher` (forms the batches), `batch` (their arrays), `outputs`.
"""
