"""A decoder split between a client with tables and head and a host that sees features out of order."""
