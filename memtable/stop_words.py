"""Lance's English stop words.

Read off Lance itself: every word of the known English lists was indexed as a document of one word (pylance
14.0.2, base_tokenizer "simple", stem false) and these were the ones not found again. Note: "no", "nor" and
"not" are kept. tantivy's own English list has 33 words only, so the same text would match differently before
and after a commit.
"""

ENGLISH: tuple[str, ...] = (
    *("i", "me", "my", "myself", "we", "our", "ours", "ourselves", "you", "your"),
    *("yours", "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers"),
    *("herself", "it", "its", "itself", "they", "them", "their", "theirs", "themselves", "what"),
    *("which", "who", "whom", "this", "that", "these", "those", "am", "is", "are"),
    *("was", "were", "be", "been", "being", "have", "has", "had", "having", "do"),
    *("does", "did", "doing", "should", "a", "an", "the", "and", "but", "if"),
    *("or", "because", "as", "until", "while", "of", "at", "by", "for", "with"),
    *("about", "against", "between", "into", "through", "during", "before", "after", "above", "below"),
    *("to", "from", "up", "down", "in", "out", "on", "off", "over", "under"),
    *("again", "further", "then", "once", "here", "there", "when", "where", "why", "how"),
    *("all", "any", "both", "each", "few", "more", "most", "other", "some", "such"),
    *("only", "own", "same", "so", "than", "too", "very", "can", "will", "just"),
    *("now", "re"),
)
