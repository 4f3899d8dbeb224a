"""The papers' claims that need no large model, regenerated: each as a page with tables and a figure."""

from megatron_rl.reproduce.page import PAGES, Page, make_page, write_page
