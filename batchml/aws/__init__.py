"""Calls of AWS, with our types. No other package reads AWS's JSON."""
