"""Workers on other machines, reached through TLS: identities, pairings, both ends of the tunnel, and discovery."""
