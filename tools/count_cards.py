"""Print the cards that ranks would use here as JSON, such as {"accelerator": "cuda", "cards": 4}.

The program is mapsage/commands/count_cards.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.count_cards')
