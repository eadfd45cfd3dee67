"""Run the rendezvous store of elastic jobs, at which their machines meet.

The program is mapsage_launcher/nodes/rendezvous.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage_launcher.nodes.rendezvous')
