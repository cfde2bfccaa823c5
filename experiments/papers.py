"""List the papers by the first part of their experiments' names."""

PAPERS = {
    "mohamed-2005": (
        "H. H. Mohamed and D. H. J. Epema, *Experiences with the KOALA co-allocating scheduler in multiclusters*, "
        "CCGrid 2005"
    ),
    "huang-2007": (
        "K.-C. Huang, P.-C. Shih and Y.-C. Chung, *Towards feasible and effective load sharing in a heterogeneous "
        "computational grid*, GPC 2007"
    ),
    "lerida-2008": (
        "J. L. Lérida, F. Solsona, F. Giné, J. R. García and P. Hernández, *Resource matching in non-dedicated "
        "multicluster environments*, VECPAR 2008"
    ),
    "sonmez-2010": (
        "O. O. Sonmez, H. H. Mohamed and D. H. J. Epema, *On the benefit of processor coallocation in multicluster "
        "grid systems*, IEEE TPDS 21(6), 2010"
    ),
    "beyond-traces": "Not in any paper: other policies, on the traces of other machines",
}
"""References of the papers."""
