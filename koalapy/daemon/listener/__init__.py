"""Accept connections: TLS, certificates, the port during start."""
