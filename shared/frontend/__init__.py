"""The main process: the HTTP app (`app`), and the TokenizerManager between it and the middle corner."""
