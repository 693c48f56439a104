"""Prices of AWS: fetched in few calls, and cached with their date. No price is in this program.

A source of prices is a module of this package and a row of `cache.SOURCES`.
"""
