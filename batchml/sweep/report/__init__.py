"""The report of a sweep: one HTML file that needs nothing else, a CSV and a JSON file beside it.

`sheet.py` gathers what the page shows, thinned, as one JSON document; the modules that it asks each
make one part of it, all of them pure. `page.py` puts it into a page, whose script draws it.
"""

from batchml.sweep.report.writing import write_report as write_report
