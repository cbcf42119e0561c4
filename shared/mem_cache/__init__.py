"""Who owns which token slot: the free lists, the request table and the radix cache.  Numbers only, no tensors."""
