from difflm.data.tokenizers import PretrainedTokenizer as PretrainedTokenizer
