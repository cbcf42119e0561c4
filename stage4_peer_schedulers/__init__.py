"""Stage 4, from September 2024 (release 0.4.0) to today: every rank is a scheduler process, all are peers.

    stage4: main                          HTTP, TokenizerManager
    ├─ stage4: detokenizer                DetokenizerManager
    ├─ stage4: scheduler TP0              Scheduler and its TpModelWorker
    └─ stage4: scheduler TP1

With --dp-size 2 a process of its own stands between:

    stage4: main
    ├─ stage4: detokenizer
    └─ stage4: data parallel controller   DataParallelController
       ├─ stage4: scheduler DP0 TP0
       ├─ stage4: scheduler DP0 TP1
       ├─ stage4: scheduler DP1 TP0
       └─ stage4: scheduler DP1 TP1

Read `server.py`, `engine.py`, `scheduler.py`, `tp_worker.py`, `tp_worker_overlap_thread.py`,
`data_parallel_controller.py`, in this order.
"""
