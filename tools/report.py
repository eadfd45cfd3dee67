"""Write the report of a run as one HTML file: curves, scores by class, pictures, devices.

The program is mapsage/commands/report.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.report')
