"""What the API reads from Kubernetes: the client's protocol, parsing into models, and the watched store."""
