"""What the demo model is asked so that it writes its own training text, and the held-out questions.

Topics of training and held-out questions are disjoint, and neither has those of the demo's prompts
(`integrations.prompts`); the wording of the questions is shared.
"""

from __future__ import annotations

import random
from typing import Final

_TOPICS: Final = """
volcanoes; honey bees; the Roman Empire; photosynthesis; chess; black holes; the printing press;
coffee; earthquakes; the human heart; solar panels; jazz music; the Great Wall of China;
penguins; democracy; vaccines; bicycles; the water cycle; dinosaurs; Shakespeare; the stock
market; yoga; rainforests; electric cars; ancient Egypt; gravity; chocolate; wolves; the Olympic
Games; meditation; plate tectonics; robots; the Moon; tea ceremonies; DNA; wind energy; painting
with oil colours; the Industrial Revolution; sleep; whales; learning a language; databases;
gardening in a small yard; the immune system; budgeting money; deserts; marathon running; the
telephone; recycling; public speaking; Mars; antibiotics; the Renaissance; elephants; algebra;
camping; the Vikings; tides; podcasts; coral reefs; the Cold War; origami; bridges; pasta; the
Sahara; artificial intelligence; rice farming; the Wright brothers; butterflies; inflation;
ballet; the periodic table; tunnels; the Amazon river; fairy tales; sugar; the human brain;
submarines; basketball; the Aztecs; fungi; cryptography; the guitar; job interviews; the ozone
layer; horses; the Middle Ages; probability; knitting; allergies; the Suez Canal; comets; street
food; bacteria; copyright; the piano; wetlands; the Mongol Empire; clouds; time management;
dolphins; microscopes; the Constitution of the United States; skiing; salt; the Milky Way;
spiders; taxes; theatre; nuclear power; bamboo; the Phoenicians; lungs; airports; haiku; forest
fires; the Panama Canal; chemistry in the kitchen; insulin; crocodiles; typography; the Great
Depression; rowing; lightning; wool; video games; the Maya calendar; eyesight; drones; sharks;
renting a flat; the Ottoman Empire; rainbows; bees in the city; stamps; open source software; the
Alps; ants; marketing a small shop; pottery; satellites; vitamins; the Black Death; soap;
football; calculus; opera; batteries; parrots; concrete; rice cookers; the Byzantine Empire;
hummingbirds; jet engines; the Great Barrier Reef; calligraphy; the nervous system; mountain
bikes; the Gold Rush; beekeeping tools; tomatoes; the speed of light; archery; the Inca roads;
maps; asthma; the harp; credit cards; wind instruments; camels; the Berlin Wall; steel; seed
banks; dreams; the Nobel Prize; puppets; the Pacific Ocean; compilers; peanuts; hot air balloons;
the Magna Carta; frogs; fermentation; trade unions; glass blowing; the Hubble telescope;
insurance; mangroves; juggling; the plague doctors; refrigerators; ravens; the Mississippi river;
logic puzzles; vaccination campaigns; snow; the Ming dynasty; typewriters; lemons; quantum
mechanics; hiking boots; the Trojan War; sea turtles; search engines; migraine; wedding customs;
the Arctic; tractors; the cello; elections; mosquitoes; paper; the Apollo missions; operating
systems; cacti; the Spanish Armada; dentistry; sailing; gold; the digestive system; folk songs;
moths; the Eiffel Tower; statistics; mushrooms in the forest; postcards; the Zulu kingdom;
cement; hibernation; the stock exchange; skateboarding; the Dead Sea; lasers; sheep; the
Enlightenment; pensions; goldfish; masks; the liver; hydropower; crossword puzzles; foxes; the
Library of Alexandria; plastic; night shifts; the Himalayas; radio; apples; relativity; fencing;
the Persian Empire; octopuses; spreadsheets; anxiety; street art; the Antarctic; trams; the drum;
immigration; termites; ink; space stations; olive oil; computer viruses; orchids; the Boston Tea
Party; first aid; surfing; copper; the skin; lullabies; beetles; the Colosseum; geometry;
truffles; libraries; the Samurai; sand; bird migration; interest rates; table tennis; the Nile;
holograms; goats; the Reformation; charity; seahorses; carnival; kidneys; geothermal energy;
board games; badgers; the Rosetta Stone; rubber; jet lag; the Andes; television; the barometer;
the Hanseatic League; zebras
"""

TRAINING_TOPICS: Final = tuple(" ".join(_TOPICS.split()).split("; "))

_TOPICS_AT_ONCE: Final = 50

TEMPLATES: Final = (
    "Explain {} to a ten-year-old child.",
    "Write a short introduction to {}.",
    "What are the most important facts about {}?",
    "Give me five tips about {}.",
    "Write a short story that involves {}.",
    "Why is it worth knowing about {}?",
    "Write a letter to a friend about {}.",
    "What are common misconceptions about {}?",
    "Summarize the history of {}.",
    "Describe {} in three paragraphs.",
    "What questions would an expert on {} ask?",
    "How has our view of {} changed over time?",
    "Make a list of ten words related to {} and explain each.",
    "Write a dialogue between a teacher and a student about {}.",
    "What are the advantages and disadvantages of {}?",
    "Tell me something surprising about {}.",
)

CODING_TASKS: Final = tuple(
    f"Write a Python function that {task}."
    for task in (
        "reverses a string",
        "finds the largest number in a list",
        "counts the vowels of a text",
        "checks whether a number is prime",
        "sorts a list of names by length",
        "merges two dictionaries",
        "computes the factorial of a number",
        "removes duplicates from a list",
        "converts Celsius to Fahrenheit",
        "reads a file and counts its lines",
        "checks whether a word is a palindrome",
        "returns the Fibonacci numbers up to n",
        "computes the average of a list of numbers",
        "finds the common elements of two lists",
        "counts how often each word occurs in a text",
        "flattens a nested list",
    )
)

HELD_OUT_TOPICS: Final = (
    "glaciers",
    "the violin",
    "kangaroos",
    "the Silk Road",
    "magnets",
    "cheese making",
    "hurricanes",
    "the French Revolution",
    "owls",
    "swimming",
)

HELD_OUT_CODING_TASKS: Final = tuple(
    f"Write a Python function that {task}."
    for task in (
        "checks whether a year is a leap year",
        "finds the second largest number in a list",
        "capitalizes every word of a sentence",
        "computes the greatest common divisor of two numbers",
    )
)


def training_prompts(seed: int) -> list[str]:
    """Return every template with every topic, 50 topics after another, and with the first 50 the
    coding tasks; in an order from the seed.

    So a longer training adds topics, and keeps the text that a shorter one has.

    Example:
        >>> len(training_prompts(0))
        4816
    """
    order, prompts = random.Random(seed), []
    for start in range(0, len(TRAINING_TOPICS), _TOPICS_AT_ONCE):
        topics = TRAINING_TOPICS[start : start + _TOPICS_AT_ONCE]
        part = [template.format(topic) for topic in topics for template in TEMPLATES]
        part += CODING_TASKS if start == 0 else ()
        order.shuffle(part)
        prompts += part
    return prompts


def held_out_prompts() -> list[str]:
    """Return questions on the held-out topics, six or seven each, and the held-out coding tasks.

    Example:
        >>> len(held_out_prompts())
        68
    """
    prompts = [
        template.format(topic)
        for place, topic in enumerate(HELD_OUT_TOPICS)
        for index, template in enumerate(TEMPLATES)
        if (index + place) % 5 < 2
    ]
    return prompts + list(HELD_OUT_CODING_TASKS)


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of the answer to a prompt; those of two trainings are far apart."""
    return seed * 1_000_000 + 1000 + index
