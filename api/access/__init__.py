"""Who is asking and what they may do: identity, tenancy, tokens, sessions, access reviews, audit."""
