"""The report of a sweep: an HTML file that needs nothing else, and a CSV and a JSON file beside it.

`data.py` collects the content of the page, thinned out, as one JSON document. `page.py` puts it
into the page, whose script draws it, and writes the three files.
"""
