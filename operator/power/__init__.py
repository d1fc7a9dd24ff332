"""PowerDomains: which nodes hang on which feed, and what the domains' statuses say."""
