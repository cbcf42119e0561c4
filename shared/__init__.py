"""The one engine that all four stages stand on; nothing in here knows how processes are arranged."""
