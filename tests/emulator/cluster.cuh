// There are no clusters here.
#pragma once
