"""Keep the rendezvous store of elastic jobs: the place where their machines meet.

The program is mapsage_launcher/rendezvous.py.
"""
from _program import run

if __name__ == '__main__':
    run('mapsage_launcher.rendezvous')
