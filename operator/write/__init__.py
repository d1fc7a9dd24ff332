"""Everything that is written to the API server: actions, the writer, events, the lease, parts of a status."""
