"""How processes of ours find, trust and talk to each other."""
