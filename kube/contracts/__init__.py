"""The wire contracts between our processes, as models and constants: no torch, no server, light to import."""
