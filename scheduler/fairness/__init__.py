"""Who is entitled to how much: fair shares of organisations, tenants and users, quotas, and past use."""
