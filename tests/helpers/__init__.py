"""Small networks, small data and watchful stand-ins that the tests share."""
