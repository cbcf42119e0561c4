"""Which request runs when: pure CPU state, numpy only, the same on every rank (architecture, "Determinism").

`SchedulerCore` is the whole of it; the other modules are its parts, in the order a request meets them:
`req`, `policy`, `admission`, `batch`, `core`, `outputs`.
"""
