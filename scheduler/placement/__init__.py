"""Which nodes a request goes to: free resources per node, gangs in topology domains, shares of devices."""
