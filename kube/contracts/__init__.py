"""The wire contracts between our processes, as models and constants, without imports of torch or a server."""
