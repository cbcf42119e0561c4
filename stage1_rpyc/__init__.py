"""Stage 1, January 2024 (release 0.1.5): a router process calls one rpyc server per tensor-parallel rank.

    stage1: main                HTTP, TokenizerManager
    ├─ stage1: detokenizer      DetokenizerManager
    └─ stage1: router           RouterManager; with TP 1 the model lives here
       ├─ stage1: model TP0     ModelRpcServer, reached over rpyc (only with TP > 1)
       └─ stage1: model TP1

Read `server.py`, `router.py`, `model_rpc.py`, in this order.
"""
