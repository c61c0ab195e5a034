"""Send the flights of the tutorial to Kafka, each as three events: scheduled, departed, landed.

    python configs/tutorial/send_flights.py [--brokers 127.0.0.1:9092] [--days 1] [--rate 100] [--create]

flights.parquet contains the flights that left New York City in the first week of 2013 (public domain, US Bureau of
Transportation Statistics). The events of all flights are sent in chronological order. The Kafka key of an event is the
key of its flight, so that one partition has all events of a flight, in order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

TOPIC, PARTITIONS = "flights", 4
AIRLINES = {
    "9E": "Endeavor Air", "AA": "American Airlines", "AS": "Alaska Airlines", "B6": "JetBlue Airways",
    "DL": "Delta Air Lines", "EV": "ExpressJet Airlines", "F9": "Frontier Airlines", "FL": "AirTran Airways",
    "HA": "Hawaiian Airlines", "MQ": "Envoy Air", "OO": "SkyWest Airlines", "UA": "United Air Lines",
    "US": "US Airways", "VX": "Virgin America", "WN": "Southwest Airlines", "YV": "Mesa Airlines",
}  # fmt: skip
CITIES = {
    "ALB": "Albany", "ATL": "Atlanta", "AUS": "Austin", "AVL": "Asheville", "BDL": "Hartford", "BHM": "Birmingham",
    "BNA": "Nashville", "BOS": "Boston", "BQN": "Aguadilla", "BTV": "Burlington", "BUF": "Buffalo", "BUR": "Burbank",
    "BWI": "Baltimore", "BZN": "Bozeman", "CAE": "Columbia", "CAK": "Akron", "CHS": "Charleston", "CLE": "Cleveland",
    "CLT": "Charlotte", "CMH": "Columbus", "CRW": "Charleston", "CVG": "Cincinnati", "DAY": "Dayton",
    "DCA": "Washington", "DEN": "Denver", "DFW": "Dallas", "DSM": "Des Moines", "DTW": "Detroit", "EGE": "Eagle",
    "EWR": "Newark", "EYW": "Key West", "FLL": "Fort Lauderdale", "GRR": "Grand Rapids", "GSO": "Greensboro",
    "GSP": "Greenville", "HDN": "Hayden", "HNL": "Honolulu", "HOU": "Houston", "IAD": "Washington", "IAH": "Houston",
    "IND": "Indianapolis", "JAC": "Jackson", "JAX": "Jacksonville", "JFK": "New York", "LAS": "Las Vegas",
    "LAX": "Los Angeles", "LGA": "New York", "LGB": "Long Beach", "MCI": "Kansas City", "MCO": "Orlando",
    "MDW": "Chicago", "MEM": "Memphis", "MHT": "Manchester", "MIA": "Miami", "MKE": "Milwaukee", "MSN": "Madison",
    "MSP": "Minneapolis", "MSY": "New Orleans", "MTJ": "Montrose", "MYR": "Myrtle Beach", "OAK": "Oakland",
    "OKC": "Oklahoma City", "OMA": "Omaha", "ORD": "Chicago", "ORF": "Norfolk", "PBI": "West Palm Beach",
    "PDX": "Portland", "PHL": "Philadelphia", "PHX": "Phoenix", "PIT": "Pittsburgh", "PSE": "Ponce",
    "PSP": "Palm Springs", "PVD": "Providence", "PWM": "Portland", "RDU": "Raleigh", "RIC": "Richmond",
    "ROC": "Rochester", "RSW": "Fort Myers", "SAN": "San Diego", "SAT": "San Antonio", "SAV": "Savannah",
    "SDF": "Louisville", "SEA": "Seattle", "SFO": "San Francisco", "SJC": "San Jose", "SJU": "San Juan",
    "SLC": "Salt Lake City", "SMF": "Sacramento", "SNA": "Santa Ana", "SRQ": "Sarasota", "STL": "St. Louis",
    "STT": "Charlotte Amalie", "SYR": "Syracuse", "TPA": "Tampa", "TUL": "Tulsa", "TYS": "Knoxville",
    "XNA": "Fayetteville",
}  # fmt: skip


def events(days: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the keys and values of all events of the first `days` days, in chronological order."""
    rows = [row for row in pq.read_table(Path(__file__).with_name("flights.parquet")).to_pylist() if row["day"] <= days]
    happened = []
    for number, row in enumerate(rows):
        leaves = row["day"] * 1440 + row["hour"] * 60 + row["minute"]
        departed = leaves + (row["dep_delay"] or 0)
        landed = departed + (row["air_time"] or 0) + 30
        happened += [(leaves - 180, number, "scheduled"), (departed, number, "departed"), (landed, number, "landed")]
    for _, number, stage in sorted(happened):
        row = rows[number]
        if stage == "landed" and row["dep_delay"] is None:
            continue  # a cancelled flight
        key = {"day": f"2013-01-{row['day']:02}", **{name: row[name] for name in ("carrier", "flight", "origin")}}
        yield key, key | _told(row, stage)


def _told(row: dict[str, Any], stage: str) -> dict[str, Any]:
    """Return the value of the event for one stage of a flight. Delays are in minutes."""
    cancelled = stage != "scheduled" and row["dep_delay"] is None
    return {
        "stage": "cancelled" if cancelled else stage,
        "airline": AIRLINES[row["carrier"]],
        "dest": row["dest"],
        "from": CITIES[row["origin"]],
        "to": CITIES[row["dest"]],
        "scheduled": row["time_hour"].replace(":00:00Z", f":{row['minute']:02}:00Z"),
        "hour": row["hour"],
        "miles": row["distance"],
        "dep_delay": None if stage == "scheduled" else row["dep_delay"],
        "arr_delay": row["arr_delay"] if stage == "landed" else None,
    }


def main() -> None:
    """Create the topic if it does not exist, and send the events."""
    options = argparse.ArgumentParser(description="Send flights to a Kafka topic.")
    options.add_argument("--brokers", default="127.0.0.1:9092")
    options.add_argument("--days", type=int, choices=range(1, 8), default=1, help="how many days of flights")
    options.add_argument("--rate", type=float, default=100, help="events per second")
    options.add_argument("--create", action="store_true", help="only create the topic")
    given = options.parse_args()
    client = {"bootstrap.servers": given.brokers}
    admin = AdminClient(client)
    if TOPIC not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
    if given.create:
        print(f"topic {TOPIC} is created")
        return
    # Idempotence keeps the order of the events of a flight if the broker refuses a batch at first.
    producer = Producer({**client, "linger.ms": 5, "enable.idempotence": True})
    began, sent = time.monotonic(), 0
    for sent, (key, value) in enumerate(events(given.days), 1):
        producer.produce(TOPIC, json.dumps(value), json.dumps(key))
        producer.poll(0)
        time.sleep(max(0.0, began + sent / given.rate - time.monotonic()))
    if left := producer.flush(30):
        raise SystemExit(f"{left} of {sent} events were not stored by {given.brokers}")
    print(f"{sent:,} events sent to topic {TOPIC}")


if __name__ == "__main__":
    main()
