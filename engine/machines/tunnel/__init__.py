"""The encrypted tunnel (TLS) to RPC workers on other machines: identities, pairings, both ends, and discovery."""
