"""Prices of AWS: fetched from AWS in few calls, and cached with their date.

No price is written in this program. A source of prices is a module here and a row of
`cache.SOURCES`.
"""
