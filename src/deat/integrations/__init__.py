"""Connections to other people's tools. Each is an optional extra, and imported when it is used."""
