"""HTTP servers: rule sets as a server, and clients of environment servers."""
