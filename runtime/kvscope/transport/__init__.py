"""How events travel: publisher, control server, client, discovery and recordings. No torch."""
